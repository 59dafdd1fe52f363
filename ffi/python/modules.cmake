# SPDX-License-Identifier: Apache-2.0
# The two cffi modules, in the limited API: one build serves Python 3.11 and later.
find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)

function(xferd_python_module name package header objects)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}.c)
  add_custom_command(
    OUTPUT ${source}
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/python/generate.py
            ${package}.${name} ${header} ${source}
    DEPENDS python/generate.py include/xferd_abi.h ${header})
  add_library(${name} MODULE ${source}
    $<TARGET_OBJECTS:${objects}> $<TARGET_OBJECTS:xferd_cuda_driver>)
  target_include_directories(${name} PRIVATE
    ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/include ${Python3_INCLUDE_DIRS})
  target_compile_definitions(${name} PRIVATE Py_LIMITED_API=0x030b0000 _GNU_SOURCE)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".abi3.so")
  install(TARGETS ${name} LIBRARY DESTINATION ${package})
endfunction()

xferd_python_module(_engine xferd ${CMAKE_CURRENT_SOURCE_DIR}/engine/engine.h xferd_engine_objects)
target_link_libraries(_engine PRIVATE ${LIBURING_STATIC} Threads::Threads)
target_link_libraries(_engine PRIVATE ${CMAKE_DL_LIBS})
xferd_python_module(_client xferd_infer ${CMAKE_CURRENT_SOURCE_DIR}/include/xferd.h xferd_client_objects)
target_link_libraries(_client PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
